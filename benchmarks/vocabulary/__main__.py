"""`python -m benchmarks.vocabulary`"""

import sys

from benchmarks.vocabulary.main import main

if __name__ == "__main__":
    sys.exit(main())
