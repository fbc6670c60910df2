"""The checks of the doctor, one module each; `check.py` above is their contract."""
