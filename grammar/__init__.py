"""Installed as ``attndsl.grammar``."""

if __name__ != "attndsl.grammar":
    raise ImportError(
        "grammar/ is the package attndsl.grammar; "
        "install the project (pip install -e .) and import that"
    )
