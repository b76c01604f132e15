"""`python -m gyroscope.cli`: the command line, for programs that start modules, such as torchrun."""

from gyroscope.cli import main

if __name__ == "__main__":
    main()
