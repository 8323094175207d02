"""The entry of the Hopper kernel that makes a forward's results and their tangents."""
# ruff: noqa: F821

#: begin


@gluon.jit
def attention_forward_tangent(
    q_desc, k_desc, v_desc, o_desc, LSE,
    q_moved_desc, k_moved_desc, v_moved_desc, o_moved_desc, LSE_MOVED,
    #: arguments
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,
    #: given
):
    """``attention_forward`` with tangents; what has none is never read."""
    given = Given(
        #: given
    )
    call = Call(
        scale, Sizes(batch, heads, kv_heads, q_len, kv_len), Origins(q_origin, kv_origin), None,
        together, COUNTER if DRAWN else None, given,
    )
    tangents = (q_moved_desc, k_moved_desc, v_moved_desc)
    results = ForwardResults(o_desc, LSE, o_moved_desc, LSE_MOVED)
    run_forward(q_desc, k_desc, v_desc, tangents, None, results, call)
