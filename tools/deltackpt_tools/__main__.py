"""``python -m deltackpt_tools`` is the same as ``deltackpt``."""

from deltackpt_tools.cli import main

if __name__ == "__main__":
    main()
