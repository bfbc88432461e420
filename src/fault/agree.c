/* The furthest member's word counts. */
#include "fault/agree.h"

#include "base/fail.h"

static even_status too_far(size_t index, const char *what, uint64_t own, uint64_t furthest) {
  (void)even_fail(EVEN_ERR_MISMATCH, "survivor %zu has come out of %llu %s and another of %llu", index,
                  (unsigned long long)own, what, (unsigned long long)furthest);
  return even_error_fix("all ranks must make the same calls in the same order");
}

even_status even_agree(const even_position *positions, size_t count, even_agreement *out) {
  uint64_t passes = 0;
  bool all_stand = true;
  *out = (even_agreement){0};
  if (count == 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "an agreement of nobody");
  }
  for (size_t i = 0; i < count; i++) {
    all_stand = all_stand && positions[i].stands;
    if (positions[i].committed > out->committed) {
      out->committed = positions[i].committed;
    }
    if (positions[i].calls > out->calls) {
      out->calls = positions[i].calls;
      out->giver = i;
    }
  }
  for (size_t i = 0; i < count; i++) {
    if (positions[i].committed + (positions[i].stands ? 0 : 1) < out->committed) { /* who stands is in no meeting */
      return too_far(i, "steps", positions[i].committed, out->committed);
    }
    if (positions[i].calls + 1 < out->calls) {
      return too_far(i, "calls", positions[i].calls, out->calls);
    }
    if (positions[i].committed == out->committed && positions[i].passes > passes) {
      passes = positions[i].passes;
    }
  }
  for (size_t i = 0; i < count; i++) {
    out->fails = out->fails || (positions[i].asks && positions[i].calls == out->calls);
  }
  out->voids = all_stand ? 0 : passes + 1;
  return EVEN_OK;
}
