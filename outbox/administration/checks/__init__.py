"""The checks of `pillarbox doctor`, by subject; `check.py` is their contract."""
