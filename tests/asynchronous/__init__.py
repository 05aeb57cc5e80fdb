"""TRL's asynchronous trainer on the CPU, with and without plugins."""
