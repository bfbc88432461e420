/* All-to-all over UCX, parts of any sizes. Small parts travel with the words that say how large they are. */
#include "comm/called.h"
#include "comm/ucx/group.h"

#include "base/fail.h"

#include <stdint.h>
#include <string.h>

static bool is_small(size_t bytes) {
  return bytes <= EVEN_UCX_SMALL_BYTES;
}

static void copy(void *target, const void *source, size_t bytes) {
  if (bytes > 0 && target != source) {
    memmove(target, source, bytes);
  }
}

/* ---- does every rank get what it expects? ---- */

/* Of a part from one rank to another: a number that both ends make alike, and hardly another part has; splitmix64's
 * finaliser (Steele, Lea, Flood, OOPSLA 2014). */
static uint64_t mark_of(int from, int to, size_t bytes, uint32_t elements) {
  uint64_t mark = (((uint64_t)(uint32_t)from << 32 | (uint32_t)to) + 1u) * 0x9e3779b97f4a7c15u ^ (uint64_t)bytes;
  mark ^= bytes == 0 ? 0 : (uint64_t)elements << 48;
  mark = (mark ^ (mark >> 30)) * 0xbf58476d1ce4e5b9u;
  mark = (mark ^ (mark >> 27)) * 0x94d049bb133111ebu;
  return mark ^ (mark >> 31);
}

/* What this rank sends less what it expects: over all ranks nothing is left, unless one expects something else. */
static uint64_t balance_of(const even_ucx_group *group, const even_comm_exchange *job) {
  uint64_t balance = 0;
  for (int rank = 0; rank < group->ranks; rank++) {
    balance += mark_of(group->rank, rank, job->sends[rank], group->call.op);
    balance -= mark_of(rank, group->rank, job->receives[rank], group->call.op);
  }
  return balance;
}

/* Names both sides, and where they called, to all ranks. With the lock held. */
static void name_both(even_ucx_group *group, int from, uint64_t sent, size_t expected) {
  char name[128];
  char given[48];
  char wanted[48];
  char own[EVEN_FLIGHT_SITE_BYTES] = "";
  char other[EVEN_FLIGHT_SITE_BYTES] = "";
  if (group->whole.ranks == 0) { /* else the larger group says where all were */
    even_flight_site_of(&group->flight, group->rank, group->call_count, own, sizeof own);
    even_flight_site_of(&group->flight, from, group->call_count, other, sizeof other);
  }
  even_ucx_name(group, from, name, sizeof name);
  even_call_describe_elements(from == group->rank ? group->call.op : group->arrived[from].call.op, given, sizeof given);
  even_call_describe_elements(group->call.op, wanted, sizeof wanted);
  (void)even_fail(EVEN_ERR_MISMATCH, "in all_to_all %s sends %llu bytes%s to rank %d, which expects %zu%s%s%s%s%s",
                  name, (unsigned long long)sent, given, group->peers[group->rank].number, expected, wanted,
                  own[0] == '\0' ? "" : "; called", own, other[0] == '\0' ? "" : ", by the other", other);
  (void)even_error_place(group->peers[from].number, NULL);
  (void)even_error_fix("what one rank's sizes and dtype say it sends must be what the other's say it receives");
}

static even_status refuse(even_ucx_group *group, int from, uint64_t sent, size_t expected) {
  (void)pthread_mutex_lock(&group->lock);
  if (group->whole.ranks == 0 && from != group->rank) {
    even_ucx_await_site(group, from);
  }
  even_status status = EVEN_ERR_MISMATCH;
  if (group->ended) { /* another found it first, or something else came */
    status = even_ucx_call_failure(group);
  } else {
    name_both(group, from, sent, expected);
    const even_error why = *even_error_last();
    even_ucx_end(group);
    status = even_error_restore(&why);
  }
  (void)pthread_mutex_unlock(&group->lock);
  return status;
}

/* Every rank says that it has found nothing; who has, ends the group instead. */
static even_status await_all(even_ucx_group *group) {
  size_t count = 0;
  (void)pthread_mutex_lock(&group->lock);
  for (int step = 1; step < group->ranks; step++) {
    int from = (group->rank + group->ranks - step) % group->ranks;
    int to = (group->rank + step) % group->ranks;
    even_ucx_receive(group, &group->transfers[count++], from, even_ucx_call_tag(group, from, 2),
                     &group->arrived[from].balance, sizeof group->arrived[from].balance);
    even_ucx_send(group, &group->transfers[count++], to, even_ucx_call_tag(group, group->rank, 2),
                  &group->outgoing[to].balance, sizeof group->outgoing[to].balance);
  }
  (void)pthread_mutex_unlock(&group->lock);
  return even_ucx_wait(group, group->transfers, count);
}

/* Where the balance is not even, which all ranks see alike, somebody finds something, or all go on: bytes fit what
 * another names otherwise. */
static even_status check_parts(even_ucx_group *group, const even_comm_exchange *job, uint64_t balance) {
  for (int rank = 0; rank < group->ranks; rank++) {
    balance += rank == group->rank ? 0 : group->arrived[rank].balance;
  }
  if (balance == 0) {
    return EVEN_OK;
  }
  even_flight_say(&group->flight);
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_report(group, false);
  (void)pthread_mutex_unlock(&group->lock);
  for (int rank = 0; rank < group->ranks; rank++) {
    bool own = rank == group->rank;
    uint64_t sent = own ? job->sends[rank] : group->arrived[rank].bytes;
    if (sent != job->receives[rank] ||
        (sent > 0 && !own && !even_called_fits(group->arrived[rank].call.op, group->call.op))) {
      return refuse(group, rank, sent, job->receives[rank]);
    }
  }
  return await_all(group);
}

/* ---- moving ---- */

static even_status exchange_parts(even_ucx_group *group, const even_comm_exchange *job) {
  size_t begun = 0;
  (void)pthread_mutex_lock(&group->lock);
  for (int rank = 0; rank < group->ranks; rank++) {
    if (rank != group->rank && !is_small(job->receives[rank])) {
      even_ucx_receive(group, &group->transfers[begun++], rank, even_ucx_call_tag(group, rank, 1), job->outputs[rank],
                       job->receives[rank]);
    }
    if (rank != group->rank && !is_small(job->sends[rank])) {
      even_ucx_send(group, &group->transfers[begun++], rank, even_ucx_call_tag(group, group->rank, 1),
                    job->inputs[rank], job->sends[rank]);
    }
  }
  (void)pthread_mutex_unlock(&group->lock);
  for (int rank = 0; rank < group->ranks; rank++) {
    if (rank == group->rank) {
      copy(job->outputs[rank], job->inputs[rank], job->sends[rank]);
    } else if (is_small(job->receives[rank])) {
      copy(job->outputs[rank], group->arrived[rank].data, job->receives[rank]);
    }
  }
  return even_ucx_wait(group, group->transfers, begun);
}

static even_status exchange(even_ucx_group *group, const even_comm_exchange *job) {
  const uint64_t balance = balance_of(group, job);
  for (int rank = 0; rank < group->ranks; rank++) {
    bool with_header = rank != group->rank && is_small(job->sends[rank]);
    group->outgoing[rank].bytes = job->sends[rank];
    group->outgoing[rank].balance = balance;
    group->lengths[rank] = with_header ? job->sends[rank] : 0;
    copy(group->outgoing[rank].data, job->inputs[rank], group->lengths[rank]);
  }
  EVEN_TRY(even_ucx_call_meet(group, 0, group->lengths));
  EVEN_TRY(check_parts(group, job, balance));
  return exchange_parts(group, job);
}

even_status even_ucx_all_to_all(even_comm *comm, const even_comm_exchange *job) {
  even_ucx_group *group = even_ucx_of(comm);
  EVEN_TRY(even_ucx_call_begin(group, EVEN_CALL_ALL_TO_ALL, EVEN_U8, 0, 0, 0, NULL));
  return even_ucx_call_end(group, exchange(group, job));
}
