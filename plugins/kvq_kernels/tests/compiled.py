"""Compile the kernels for an H100, which takes no GPU; a type or shape that only the compiler refuses is found here."""

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvq_kernels import triton_encode, triton_loops
from kvq_kernels.encode_gpu import FIELDS, VECTORS
from kvq_kernels.gpu import STAGES
from kvq_kernels.triton_loops import BOOK as PLAIN_BOOK
from kvq_kernels.triton_loops import LEVELS, SHIFTED_BOOK, SIGNED_BOOK, Full, Shifts, Side

FP32 = ("q_rotated", "q_plain", "out", "tops", "totals", "rotated", "plain", "k_shift")
NUMBERS = ("i32",) * 10
SIDE = Side(*["*u8"] * 3, "*fp16", "*fp16", "*fp16", NUMBERS, "i32")
BOOKS = Side(*["*u8"] * 3, "*fp32", "*i32", "*fp32", NUMBERS, "i32")
KINDS = dict.fromkeys(FP32, "*fp32") | {"keys": SIDE, "values": SIDE, "full": Full("*bf16", "*bf16", NUMBERS[:4])}
KINDS |= {"v_shifts": Shifts("*fp32", "*fp32", NUMBERS[:4], "i32"), "scaling": "fp32", "softcap": "fp32"}
INT2 = {
    "dim": 128, "kw0": 2, "kw1": 0, "kw2": 0, "vw0": 2, "vw1": 0, "vw2": 0, "k_channel": True, "v_channel": False,
    "k_kind": 0, "v_kind": 0, "k_top": 1, "v_top": 1, "normed_k": True, "normed_v": False, "shifted_k": False,
    "shifted_v": False, "capped": False, "n": 32, "d": 128, "rows": 16, "half": True,
}  # fmt: skip
OTHER = {"kw1": 1, "vw0": 8, "half": False, "k_channel": False, "v_channel": True, "normed_v": True, "capped": True}
BOOK = INT2 | {"k_channel": False, "k_kind": SIGNED_BOOK, "v_kind": PLAIN_BOOK, "normed_v": True, "shifted_k": True}
BOOK |= {"kw0": 0, "vw0": 0, "shifted_v": True}
TABLES = KINDS | {"keys": BOOKS, "values": BOOKS}
LEVEL = BOOK | {"k_kind": LEVELS, "kw0": 4, "kw1": 1, "v_kind": SHIFTED_BOOK, "half": False}
LEVEL_KINDS = TABLES | {"keys": BOOKS._replace(low="*fp32")}


ENCODE = dict.fromkeys(("p0", "p1", "p2"), "*u8") | dict.fromkeys(("scale", "low_at", "norm_at"), "*fp16")
ENCODE |= dict.fromkeys(("low_given", "high_given", "low", "high"), "*fp32")
ENCODE |= dict.fromkeys(("clip", "levels", "top", "root", "norm_root"), "fp32") | {"x": "*bf16", "matrix": "*bf16"}
KEYS = {
    "dim": 128, "w0": 2, "w1": 0, "w2": 0, "per_channel": True, "span": 128, "given": False, "kind": 0, "gain": 0,
    "rotated": True, "signs": True, "normed": True, "step_n": 32, "n": 32, "d": 128, "k": 128,
}  # fmt: skip
VALUES = KEYS | {"per_channel": False, "span": 32, "normed": False}
LONG = KEYS | {"w1": 1, "given": True, "gain": 4, "kind": 1, "rotated": False}
WIDE = KEYS | {"dim": 200, "signs": False, "gain": 2, "kind": 2, "step_n": 100, "n": 128, "d": 256, "k": 32}
RANGES = {"dim": 200, "rotated": True, "signs": False, "normed": True, "n": 32, "d": 256, "k": 32}
SEARCH = dict.fromkeys(("vectors", "columns", "scores"), "*fp32") | dict.fromkeys(("codes", "signs"), "*u8")
TRELLIS = dict.fromkeys(("x", "weights", "books", "out"), "*fp32")
TRELLIS |= dict.fromkeys(("strings", "widths", "back", "codes"), "*u8")
TRELLIS |= dict.fromkeys(("places", "shifts", "masks", "entries"), "*i32")
SHARED = 227 * 1024
"""Bytes that a program of an H100 may keep beside its registers."""


def build(kernel, constants, kinds=KINDS, warps=4, stages=3, fused=True):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fused}
    built = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.asm["ptx"]
    assert built.metadata.shared <= SHARED
    print(kernel.__name__, f"{built.metadata.shared} bytes of shared memory")


if __name__ == "__main__":
    for constants in (INT2, INT2 | OTHER, INT2 | {"dim": 256, "d": 256, "half": False}):
        build(triton_loops.attend_split, constants)
    build(triton_loops.attend_split, BOOK, TABLES, stages=STAGES["tables"])
    build(triton_loops.attend_split, LEVEL, LEVEL_KINDS, stages=STAGES["tables"])
    build(triton_loops.combine, {"dim": 128, "d": 128})
    for constants in (KEYS, VALUES, LONG):
        kinds = ENCODE | {"low_at": "*i16"} if constants["kind"] == 1 else ENCODE
        build(triton_encode.encode_tile, constants, kinds)
    wide = ENCODE | {"x": "*fp32", "matrix": "*fp32"}
    build(triton_encode.encode_tile, WIDE, wide, 8)
    build(triton_encode.encode_tile, KEYS | {"gain": 4, "rotated": False, "step_n": 128, "n": 128}, ENCODE, 8)
    build(triton_encode.ranges, RANGES, wide)
    for signed in (True, False):
        build(triton_encode.search, {"signed": signed, "n": VECTORS}, SEARCH)
    for memory in (6, 8, 10, 12):
        constants = {"memory": memory, "widest": min(memory, 8)}
        build(triton_encode.search_trellis, constants, TRELLIS, max(1, min(8, 2**memory // 128)), fused=False)
    build(triton_encode.read_fields, {"tile": FIELDS}, TRELLIS)
