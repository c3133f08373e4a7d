"""``python -m fastconv`` is the command ``fastconv``."""

import sys

from _fastconv_command import main

sys.exit(main())
