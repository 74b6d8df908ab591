"""What kvgate makes of each route and field of vLLM's: a table, the tests that hold it true, and the document of it."""
