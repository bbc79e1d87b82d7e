"""The load generator: a lean client of servers with OpenAI's API."""
