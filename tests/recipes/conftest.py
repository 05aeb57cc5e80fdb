"""The recipes' own modules are imported as their scripts import them."""

import sys

from tests.recipes.launching import RECIPES

sys.path.insert(0, str(RECIPES))
