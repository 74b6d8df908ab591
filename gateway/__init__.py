"""kvgate: token-budgeted admission control in front of vLLM fleets.  Read `flow.py` first."""

__version__ = "0.1.0"
