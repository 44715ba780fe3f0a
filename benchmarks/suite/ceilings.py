"""The part that measures what the machine does at best, by sizes: how large a copy must be to reach the rate."""

from suite.bench import Bench
from suite.best_rates import copy_rates, gemm_rates, read_rates, transfer_rates
from suite.log import Measurement


def run(bench: Bench) -> None:
    """Measure everything."""
    device, sizes = bench.device, bench.sizes
    bench.log.add(Measurement("copy within the device", "GB/s", copy_rates(device, sizes.ceiling_nbytes)))
    bench.log.add(Measurement("read by torch.sum", "GB/s", read_rates(device, sizes.ceiling_nbytes)))
    for to_device, name in ((True, "pinned host to device"), (False, "device to pinned host")):
        for part in (1, 8, 64):
            nbytes = sizes.ceiling_nbytes // 2 // part
            label = f"{name}, {nbytes >> 20} MiB a copy"
            bench.log.add(Measurement(label, "GB/s", transfer_rates(device, nbytes, to_device)))
    for rows in (sizes.gemm, sizes.gemm // 4):
        label = f"bf16 GEMM {rows} x {sizes.gemm} x {sizes.gemm}"
        bench.log.add(Measurement(label, "TFLOP/s", gemm_rates(device, sizes.gemm, rows)))
