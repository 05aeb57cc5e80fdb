"""Everything that this package relies on inside TRL. A release that changes something is met here and nowhere else.

| module | what it holds |
| --- | --- |
| `contract` | the tables: supported versions, methods, attributes, entries of batches, loss types; and their checks |
| `reading` | facts read off a trainer: `RunFacts`, `Progress`, `LossSettings`, and single settings |
| `acting` | what is done to a trainer: metrics, tables, batches, trials of its loss |

`tests/trainer/upstream` runs the contract against the installed TRL; an error names what changed.
"""
