"""The constants of a prediction in words."""

from helpers.hand_timed import CONSTANTS, mesh

from maxpipe.compile.prediction import predict
from maxpipe.compile.prediction.predict import basis_of
from maxpipe.devices.chips import chip_of


def test_basis_names_the_network_between_slices_where_there_are_several(monkeypatch):
    for slices, names_dcn in ((1, False), (2, True)):
        monkeypatch.setattr(predict, "compiler_version", lambda: "0.0")
        chip = chip_of("v5p")
        text = basis_of(mesh(slices), chip).text()
        assert text.startswith("libtpu 0.0's cycle estimates; 1.75 GHz, "), (slices, names_dcn)
        assert (f", DCN {chip.dcn_bandwidth / 1e9:.3g} GB/s" in text) == names_dcn


def test_constants_without_a_known_network_name_none():
    assert "DCN" not in CONSTANTS.text(crosses_slices=True)
