"""An OpenAI-compatible front that admits, places, forwards and reports for clients that know nothing of moorage."""
