"""Everything that this package relies on inside TRL: `contract` lists it, `reading` reads, `acting` changes.

What differs between supported releases stands in `releases`. `tests/trainer/upstream` runs the contract.
"""
