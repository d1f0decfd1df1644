"""python -m whereformer"""

from whereformer.cli import main

if __name__ == "__main__":
    main()
