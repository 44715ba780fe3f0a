"""Small models as files, in the formats of each family and quantiser."""
