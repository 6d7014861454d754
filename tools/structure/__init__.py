"""The rules of the house that a machine can check. `tools/check_structure.py` runs them all."""
