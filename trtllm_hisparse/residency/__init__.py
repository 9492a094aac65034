"""The policy that moves pages: admission, reclaim, population. No bytes move here."""
