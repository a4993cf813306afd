"""Workers that train for themselves and are brought together now and then: their parameters, averaged."""
