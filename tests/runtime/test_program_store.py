"""Programs of specs: what is said of those that import others."""

import warnings

import attndsl


def test_an_imported_file_may_have_more_than_a_program_uses(tmp_path):
    (tmp_path / "lib.attn").write_text("near = q - kv < 5\nnever = q < kv and kv < q\n")
    path = tmp_path / "a.attn"
    path.write_text('import "lib.attn"\nmine = q\nmask = never\n')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attndsl.load(path)
    said = [each.message.message for each in caught]
    assert said == ["nothing reads 'mine'", "the mask is false for all pairs"]
