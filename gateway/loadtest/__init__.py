"""An open-loop load test with clients that behave as real ones: `kvgate loadtest`."""
