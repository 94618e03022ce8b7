"""The table of the data sets is whole, and what is decoded is the original."""

import re

import pytest

from bayesbackprop_paper.data import DATA_SETS, sources

pytestmark = pytest.mark.identities


def test_the_table_is_whole() -> None:
    for name, data_set in DATA_SETS.items():
        assert data_set.what, name
        assert data_set.licence, name
        found = data_set.wheels or any(file.addresses for file in data_set.files)
        assert found or data_set.advice, name  # where users must find it themselves
        assert data_set.download > 0 or not found, name
        for file in data_set.files:
            assert file.members or file.addresses or not found, (name, file)
            assert all(address.url.endswith(f"/{file.name}.gz") for address in file.addresses), (name, file)
            for row in (file, *(member.wheel for member in file.members)):
                assert re.fullmatch("[0-9a-f]{64}", row.sha256), (name, file)
                assert row.size > 0, (name, file)


def test_decoding_restores_the_originals() -> None:
    header = ",".join(f"column{i}" for i in range(22))
    letters = "pxsntpfcnkeesswwwopksu"
    decoded = sources._mushroom(f"{header}\r\n{','.join(letters)}\r\n".encode())
    assert decoded == b"p,x,s,n,t,p,f,c,n,k,e,e,s,s,w,w,p,w,o,p,k,s,u\n"
    assert sources._without_header(b"a,b\n1,2\n\n") == b"1,2\n\n"
