"""New distributions with one plugin each: the choices. `distribution` makes them from the templates."""

from typing import Literal

PluginKind = Literal["reward", "hook", "aggregation", "filter", "token-loss", "sampler"]
