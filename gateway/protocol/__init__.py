"""The Responses protocol as pure values and state machines: no asyncio, sockets, clocks, files or Ray.

All three packages may import this one; it imports none of them. `tests/test_imports.py` holds it to that.
"""
