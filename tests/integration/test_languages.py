"""The stubs for other languages: each builds, plays the conformance table, and runs its example on a live server."""

from __future__ import annotations

import pytest

from tests.integration.languages import BUILD_S, LANGUAGES, TEST_S, Language, run, toolchain

pytestmark = pytest.mark.timeout(BUILD_S + TEST_S)


@pytest.mark.parametrize("language", LANGUAGES, ids=[language.directory for language in LANGUAGES])
def test_language(language: Language, conformance_servers: dict[str, str]) -> None:
    toolchain(language)
    run(language, language.build, {}, BUILD_S)
    run(language, language.test, conformance_servers, TEST_S)
