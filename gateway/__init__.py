"""The edge of Limpet: what clients see. Sockets, HTTP, SSE, settings, the command line."""

__version__ = "0.1.0"
