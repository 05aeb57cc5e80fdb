r"""Words after a quantity: a unit (`18 \text{ cm}`), or a part of what is said (`k \text{ is even}`)."""

import re

_NAMES = r"""
mm cm dm m km in inch inches ft foot feet yd yard yards mi mile miles mg g gm kg t ton tons tonne tonnes lb lbs pound
pounds oz ounce ounces ms s sec secs second seconds min mins minute minutes h hr hrs hour hours d day days week weeks
month months yr yrs year years L l mL ml liter liters litre litres gal gallon gallons N kN J kJ W kW Pa kPa atm K Hz
kHz MHz V mV A mA C F T mol eV keV MeV rad radian radians degree degrees deg cc sq square cubic cu unit units meter
meters metre metres centimeter centimeters kilometer kilometers kilogram kilograms gram grams dollar dollars cent cents
euro euros rupee rupees Rs rs USD EUR GBP mph kmph per am pm
"""
_UNITS = re.compile(rf"(?:{'|'.join(_NAMES.split())})\.?(?:\^?\{{?-?[23]\}}?|[²³])?")
_WORDS = re.compile(r"[A-Za-z][a-z]+(?:[ -][A-Za-z]?[a-z]+){0,4}\.?")
_SAID = re.compile(
    r"\b(?:no|not|non|never|and|or(?! so\b)|but|than|least|most|over|under|above|below|up|between|is|are|was|were|be|if"
    r"|when|where|unless|otherwise|dozens?|hundreds?|thousands?|millions?|billions?|trillions?|hal(?:f|ves)|thirds?"
    r"|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|squared|cubed|factorial|plus|minus|mod"
    r"|modulo|base|inf|sqrt)\b",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"[\s~/·*]|\\[,;:! ]|\\cdot|\\times")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")


def is_unit(words: str, quantity: str = "") -> bool:
    """Whether words after a quantity name what it counts: after a number any noun, after letters a unit alone."""
    parts = [part for part in _BETWEEN.split(words) if part]
    if all(_UNITS.fullmatch(part) for part in parts):
        return True
    counts = _WORDS.fullmatch(words.strip()) is not None and _SAID.search(words) is None
    return counts and _LETTER.search(quantity) is None
