"""The HTTP endpoint for agents: episodes as sessions behind the chat, completion, responses
and messages APIs."""
