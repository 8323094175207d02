"""The entry of the forward kernel for Hopper."""
# ruff: noqa: F821

#: begin


@gluon.jit
def attention_forward(
    q_desc, k_desc, v_desc, o_desc, LSE,
    #: arguments
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,
    #: given
):
    """LSE (2, batch, heads, q_len) is contiguous fp32.

    A work tile is one query tile of one head. A program has one, or where PERSISTENT one after the
    other, until all are taken. COUNTER (1) is int32: work tiles taken after each program's first; 0
    before a launch, and after.
    Descriptors are of (batch, heads, length, head dim): blocks of one head's rows.
    """
    given = Given(
        #: given
    )
    call = Call(
        scale, Sizes(batch, heads, kv_heads, q_len, kv_len), Origins(q_origin, kv_origin), None,
        together, COUNTER if DRAWN else None, given,
    )
    bias_descs = None
    if HAS_BIAS:
        bias_descs = (pair0_desc, pair1_desc) if BIAS_TILES == 2 else (pair0_desc,)
    results = ForwardResults(o_desc, LSE, None, None)
    run_forward(q_desc, k_desc, v_desc, None, bias_descs, results, call)
