#include "comm/called.h"

static _Thread_local even_comm_called next;

static bool only_moves(uint32_t kind) {
  return kind == EVEN_CALL_ALL_GATHER || kind == EVEN_CALL_BROADCAST || kind == EVEN_CALL_ALL_TO_ALL ||
         kind == EVEN_CALL_GATHER || kind == EVEN_CALL_SCATTER;
}

void even_comm_call_as(const even_comm_called *called) {
  next = called == NULL ? (even_comm_called){0} : *called;
}

void even_called_take(const even_comm_base *base, even_comm_call *call) {
  if (call->kind != EVEN_CALL_REDUCE_SCATTER && !only_moves(call->kind)) {
    return;
  }
  if (next.kind != 0) {
    call->kind = next.kind;
    call->root = next.root;
    call->count = next.count;
  }
  if (only_moves(call->kind)) {
    call->op = next.elements != 0 ? next.elements : base->elements;
  }
  next = (even_comm_called){0};
}

even_comm_called even_called_take_message(void) {
  const even_comm_called taken = next;
  next = (even_comm_called){0};
  return taken;
}

void even_called_again(const even_comm_call *call) {
  bool rooted = call->kind == EVEN_CALL_GATHER || call->kind == EVEN_CALL_SCATTER;
  next = (even_comm_called){
      .kind = rooted ? call->kind : 0, .root = call->root, .count = call->count, .elements = call->op};
}

void even_called_pass_on(const even_comm_call *call, even_comm *part) {
  even_comm_base_of_mutable(part)->elements = only_moves(call->kind) ? call->op : 0;
}

bool even_called_fits(uint32_t sent, uint32_t received) {
  const uint32_t bytes = EVEN_CALLED_DTYPE(EVEN_U8);
  return sent == received || sent == 0 || received == 0 || sent == bytes || received == bytes;
}
