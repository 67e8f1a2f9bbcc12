"""Files are written in one step, or not at all."""

import pytest

from ackpt.core.files import RecordError, write_text_atomic


def test_a_folder_is_refused_as_a_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecordError, match="name a file in it"):
        write_text_atomic(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
