"""Everything that this package relies on inside TRL: `contract` lists it, `reading` reads, `acting` changes.

`tests/trainer/upstream` runs the contract against the installed TRL; an error names what changed.
"""
