"""How fast is flash_attention beside torch's flash and cuDNN attention, FlexAttention and flash-attn, and how near to the chip's limit?

    python benchmarks/attention.py [--lengths 512 ... 16384] [--widths 64 128] [--tokens 16384] [--quick]

Needs an NVIDIA GPU. Causal, forward and backward, bf16, 16 heads of width 128 or 32 of width 64 (2,048 channels); rows of a length fill
`--tokens` tokens. With and without ALiBi and packed documents. Useful work only is counted: the pairs that a mask hides don't count.
The share is that of the best rate that matrix products reach on this GPU, measured first. What cannot run a case is left out with
its reason. Appends a line for each measurement to results/attention.jsonl; figures of this project's own: not yet seen.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from llm_from_scratch.model import alibi_slopes
from llm_from_scratch.triton_attention import attention_flops, flash_attention

RESULTS = Path(__file__).parent / "results" / "attention.jsonl"
NUM_DOCUMENTS = 8  # a row, of equal lengths


def milliseconds(action, repeats: int = 20) -> float:
    "Median time on the GPU, after warming up."
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def matrix_rate() -> float:
    "The best FLOP/s of a bf16 product of square matrices."
    rates = []
    for size in (4096, 8192):
        one, other = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        rates.append(2 * size**3 / milliseconds(lambda: one @ other) * 1e3)
    return max(rates)


def sdpa(backend):
    "torch's attention held to one backend; it takes neither slopes nor documents without a table."
    def attend(q, k, v, slopes, doc_ids):
        if slopes is not None or doc_ids is not None:
            raise ValueError("takes no slopes and no documents without the whole table")
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def flex():
    "FlexAttention, compiled; block masks are made once a shape and not timed."
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, masks = torch.compile(flex_attention), {}

    def attend(q, k, v, slopes, doc_ids):
        length = q.shape[2]
        key = (q.shape, doc_ids is None)
        if key not in masks:
            def visible(batch, head, query, at_key):
                causal = query >= at_key
                return causal if doc_ids is None else causal & (doc_ids[batch, query] == doc_ids[batch, at_key])

            masks[key] = create_block_mask(visible, None if doc_ids is None else q.shape[0], None, length, length, device="cuda")

        def bias(score, batch, head, query, at_key):
            return score - slopes[head] * (query - at_key)

        return compiled(q, k, v, score_mod=None if slopes is None else bias, block_mask=masks[key])

    return attend


def flash_attn():
    "The flash-attn package, where it is installed."
    from flash_attn import flash_attn_func

    def attend(q, k, v, slopes, doc_ids):
        if doc_ids is not None:
            raise ValueError("takes documents as unpadded sequences only")
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, alibi_slopes=slopes).transpose(1, 2)

    return attend


def contestants() -> dict:
    "What is to be measured, by name; what is not installed is said and left out."
    backend = torch.nn.attention.SDPBackend
    found = {"ours": lambda q, k, v, slopes, doc_ids: flash_attention(q, k, v, slopes=slopes, doc_ids=doc_ids),
             "sdpa flash": sdpa(backend.FLASH_ATTENTION), "sdpa cudnn": sdpa(backend.CUDNN_ATTENTION)}
    for name, make in (("flex", flex), ("flash-attn", flash_attn)):
        try:
            found[name] = make()
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return found


def measure(attend, length: int, width: int, tokens: int, features: str) -> dict:
    "Milliseconds and FLOP/s, forward and backward."
    batch, heads = max(1, tokens // length), 2048 // width
    q, k, v = (torch.randn(batch, heads, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    slopes = alibi_slopes(heads).cuda() if "alibi" in features else None
    size = length // NUM_DOCUMENTS if "documents" in features else length
    doc_ids = (torch.arange(length, device="cuda") // size).repeat(batch, 1) if "documents" in features else None
    out = attend(q, k, v, slopes, doc_ids)
    upstream = torch.randn_like(out)
    row = {}
    for name, action in (("forward", lambda: attend(q, k, v, slopes, doc_ids)),
                         ("backward", lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True))):
        work = batch * heads * (length // size) * attention_flops(size, size, width, backward=name == "backward")
        row[f"{name}_ms"] = milliseconds(action)
        row[f"{name}_flops"] = work / row[f"{name}_ms"] * 1e3
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--quick", action="store_true", help="two lengths and width 128 only: under two minutes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: benchmarks/attention.py measures on an NVIDIA GPU, and torch finds none here", file=sys.stderr)
        return 2
    if options.quick:
        options.lengths, options.widths = [1024, 8192], [128]
    peak, rivals = matrix_rate(), contestants()
    print(f"{torch.cuda.get_device_name()}: matrix products reach {peak / 1e12:.0f} TFLOP/s")
    for width in options.widths:
        for length in options.lengths:
            for features in ("causal", "causal alibi", "causal documents", "causal alibi documents"):
                for name, attend in rivals.items():
                    case = dict(attention=name, length=length, width=width, features=features)
                    try:
                        row = case | measure(attend, length, width, options.tokens, features)
                    except (ValueError, RuntimeError) as error:
                        print(f"{name:11} {length:6} {width:4} {features:23} left out: {str(error).splitlines()[0][:90]}")
                        continue
                    rates = [row[f"{part}_flops"] for part in ("forward", "backward")]
                    print(f"{name:11} {length:6} {width:4} {features:23}", *(f"{rate / 1e12:6.0f} TFLOP/s {rate / peak:4.0%}" for rate in rates), flush=True)
                    with RESULTS.open("a") as file:
                        print(json.dumps(row | dict(matrix_flops=peak, gpu=torch.cuda.get_device_name(), torch=torch.__version__)), file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
