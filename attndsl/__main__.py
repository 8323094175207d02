"""``python -m attndsl``, where the command is not on the path."""

from attndsl.cli import main

if __name__ == "__main__":
    main()
