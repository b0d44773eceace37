"""Print one greeting. Usage: greet.py NAME [--language CODE]"""

import argparse

GREETINGS = {"de": "Guten Tag", "en": "Good day", "es": "Buenos días", "fr": "Bonjour", "ja": "こんにちは"}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("name")
parser.add_argument("--language", choices=sorted(GREETINGS), default="en")
args = parser.parse_args()
print(f"{GREETINGS[args.language]}, {args.name}!")
