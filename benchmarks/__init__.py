"""What Limpet costs, measured on the machine at hand: `python -m benchmarks.NAME [--json]`. Never part of the tests."""
