from __future__ import annotations

from datetime import UTC, datetime

import pytest

from hetopt.optimizer.market.catalog import Catalog, load_catalog

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return load_catalog()
