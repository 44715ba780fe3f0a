"""What several test files need: models, engines, servers, fakes."""
