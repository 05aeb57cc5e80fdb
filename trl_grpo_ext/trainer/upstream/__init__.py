"""Everything that this package relies on inside TRL: `contract` lists it, `reading` reads, `acting` changes it."""
