"""LSF: where rank 0 is."""

import pytest

from fitkit.distributed.cluster import detect
from fitkit.errors import ConfigurationError
from tests.launched import LSF


def test_lsf_s_hosts_are_read_from_whichever_variable_has_them(tmp_path):
    rest = {key: value for key, value in LSF.items() if key != "LSB_MCPU_HOSTS"}
    assert detect(rest | {"LSB_HOSTS": "batch a a b b"}).master_address == "a"
    ranks = tmp_path / "ranks"
    ranks.write_text("batch\na\na\nb\nb\n")
    assert detect(rest | {"LSB_DJOB_RANKFILE": str(ranks)}).master_address == "a"
    assert detect(rest | {"LSB_HOSTS": "a a b b"}).master_address == "a"  # No launch node.
    with pytest.raises(ConfigurationError, match="LSB_DJOB_RANKFILE.*MASTER_ADDR"):
        detect(rest | {"LSB_DJOB_RANKFILE": str(tmp_path / "absent")})
    with pytest.raises(ConfigurationError, match="1 hosts.*2 nodes"):
        detect(rest | {"LSB_HOSTS": "batch"})
