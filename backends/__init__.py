"""Installed as ``attndsl.backends``."""

if __name__ != "attndsl.backends":
    raise ImportError(
        "backends/ is the package attndsl.backends; "
        "install the project (pip install -e .) and import that"
    )
