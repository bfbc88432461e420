/* An all-reduce over several hosts whose leg between them is the caller's own. */
#include "comm/hosts/leg.h"

#include "base/fail.h"
#include "comm/hosts/group.h"
#include "comm/recording.h"

bool even_hosts_place_of(const even_comm *comm, even_hosts_place *out) {
  const even_hosts_group *group = even_hosts_within(comm);
  if (group == NULL) {
    return false;
  }
  *out = (even_hosts_place){.hosts = group->hosts, .host = group->own_host, .leads = even_hosts_leads(group)};
  return true;
}

typedef struct errand {
  float *values;
  float *total;
  size_t count;
  even_hosts_leg *leg;
  void *context;
} errand;

static even_status run(even_hosts_group *group, const errand *job) {
  even_status status = EVEN_OK;
  if (group->locals > 1) {
    EVEN_TRY(even_hosts_reduce_inside(group, job->values, job->values, job->count, EVEN_F32, EVEN_SUM));
  }
  if (even_hosts_leads(group)) {
    status = job->leg(group->between, job->context);
  }
  EVEN_TRY(even_hosts_agree(group, status));
  return group->locals > 1 ? even_comm_broadcast(group->inside, job->total, job->count * sizeof *job->total, 0)
                           : EVEN_OK;
}

even_status even_hosts_reduce_by_leg(even_comm *comm, float *values, float *total, size_t count, even_hosts_leg *leg,
                                     void *context) {
  even_hosts_group *group = even_hosts_of(comm);
  const errand job = {.values = values, .total = total, .count = count, .leg = leg, .context = context};
  even_call_record record = {
      .call = EVEN_RECORDED_ALL_REDUCE, .dtype = EVEN_F32, .op = EVEN_SUM, .peer = -1, .bytes = count * sizeof *values};
  even_recording_begin(comm, &record);
  even_status status = even_hosts_begin(group, EVEN_CALL_ALL_REDUCE, EVEN_F32, EVEN_SUM, 0, count);
  if (status == EVEN_OK) {
    status = even_hosts_end(group, run(group, &job));
  }
  return even_recording_end(comm, &record, status);
}
