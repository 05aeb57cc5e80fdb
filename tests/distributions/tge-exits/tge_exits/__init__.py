import sys

sys.exit("tge-exits has had enough")
