"""Files of the MOT Challenge: reading, writing and invalid lines."""

import numpy as np
import pytest

from fastamp.tracking import read_boxes, write_boxes
from fastamp.utils.errors import DataError


def test_read_sorts_by_frame_and_keeps_the_lines(tmp_path):
    path = tmp_path / "det.txt"
    path.write_text("2,-1,1,2,3,4,0.5,-1,-1,-1\n\n1, -1, 5.5,6,7,8\n2,-1,9,9,9,9,0.25\n")
    boxes = read_boxes(path)
    assert boxes.frames.tolist() == [1, 2, 2] and boxes.lines.tolist() == [3, 1, 4]
    assert boxes.boxes[0].tolist() == [5.5, 6, 7, 8] and boxes.confidences.tolist() == [1, 0.5, 0.25]


def test_separators_headers_and_comments(tmp_path, subtests):
    for header in ("", "frame,id,bb_left,bb_top,bb_width,bb_height,conf\n", "# detector 3\n\n"):
        for separator in (",", ", ", ";", "|", "\t", " ", "   "):
            with subtests.test(f"{header} {separator}"):
                path = tmp_path / "det.txt"
                rows = "1,-1,5.5,6,7,8,0.5\n2,-1,1,2,3,4,0.25,-1,-1,-1  # last\n"
                path.write_text((header + rows).replace(",", separator))
                boxes = read_boxes(path)
                assert boxes.boxes.tolist() == [[5.5, 6, 7, 8], [1, 2, 3, 4]] and boxes.confidences.tolist() == [
                    0.5,
                    0.25,
                ]


def test_written_boxes_can_be_read(tmp_path):
    path = tmp_path / "det.txt"
    path.write_text("1,3,1,2,3.25,4,0.5\n2,4,1,2,3,4,1\n")
    write_boxes(tmp_path / "out.txt", read_boxes(path))
    again = read_boxes(tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text().splitlines()[0] == "1,3,1.00,2.00,3.25,4.00,0.5,-1,-1,-1"
    np.testing.assert_array_equal(again.boxes, read_boxes(path).boxes)
    assert again.ids.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "contains no boxes"),
        ("1,-1,0,0,5,5\n0,-1,0,0,5,5\n", "line 2: frame 0"),
        ("1,-1,0,0,5\n", "line 1"),
        ("1;-1;0;0;5,5;5\n", "line 1: width"),
        ("0.1,1,2,3\n", "line 1"),
        ("1,-1,0.1,0.2,0.3,0.4\n2,-1,0,0,1,1\n", "normalized"),
        ("1e300,-1,0,0,5,5\n", "frame must be an integer"),
        ("1,-1,0,0,-5,5\n", "width -5"),
        ("1,-1,0,0,5,0\n", "height 0"),
        ("1.5,-1,0,0,5,5\n", "frame must be an integer"),
        ("1,-1,nan,0,5,5\n", "left must be a number"),
        ("1,-1,0,0,5,inf\n", "height must be a number"),
        ("frame,id,left,top,width,height\n", "contains no boxes"),
        ("frame,id,x1,y1,x2,y2\n1,-1,0,0,5,5\n", "line 1: the header has 'x2'"),
        ("frame,id,x,y,w,h,class\n1,-1,0,0,5,5,1\n", "'class'"),
        ("1,-1,0,0,5,5\nframe,id,left,top,width,height\n", "line 2: frame"),
    ],
)
def test_invalid_file_is_one_message_with_the_line(tmp_path, text, found):
    path = tmp_path / "det.txt"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        read_boxes(path)
    assert found in str(error.value) and str(path) in str(error.value)


def test_missing_and_binary_files(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("x.txt", "missing.txt"):
        with pytest.raises(DataError, match=name):
            read_boxes(tmp_path / name)
