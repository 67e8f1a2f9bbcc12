"""Do all links of the built book lead somewhere, and do all its images say what they show?"""

from built_pages import broken_links, broken_repository_links, images_without_text
from conftest import ROOT


def test_internal_links_and_anchors_resolve(site, path):
    assert broken_links(site, path) == []


def test_links_into_the_repository_name_files_that_exist(site, path):
    assert broken_repository_links(site, path, ROOT) == []


def test_images_have_a_text(site, path):
    assert images_without_text(site, path) == []


def test_a_page_is_smaller_than_500_kb(site, path):
    assert (site / path).stat().st_size < 500_000
