"""What reaches one tensor-parallel rank: GEMM shapes, and bytes of weights, cached state and communication. Pure."""
