/* What is said where no checkpoint of another host could be brought, and none is here. */
#include "base/fail.h"
#include "orchestrator/bring_back.h"
#include "os/path.h"

#define NOT_BEGUN_ANEW "no whole checkpoint of the job is left here, and it is not begun anew, for host "

static const char *own_folder(const even_job *job) {
  return job->params->checkpoint_folder == NULL ? "the folder of checkpoints" : job->params->checkpoint_folder;
}

even_status even_bring_back_refuse_anew(const even_job *job, const char *host, const char *folder, const char *why) {
  (void)even_fail(EVEN_ERR_NOT_FOUND, NOT_BEGUN_ANEW "%s has a copy of %s (%s there)%.200s", host,
                  even_path_name(folder), folder, why);
  return even_error_fix(
      "copy it back into %s (rsync -a %s:%s %s/); then --name NAME --resume auto goes on from it, and without --resume "
      "training begins anew",
      own_folder(job), host, folder, own_folder(job));
}

even_status even_bring_back_refuse_memory(const even_job *job, const char *host, const char *folder, const char *why) {
  (void)even_fail(EVEN_ERR_NOT_FOUND, NOT_BEGUN_ANEW "%s has %s in its memory alone, where it ends with this job%.200s",
                  host, even_path_name(folder), why);
  return even_error_fix(
      "training begins anew without --resume: first see that %s takes a checkpoint, and keep copies on disks, too "
      "(--checkpoint-copies), which outlive a job",
      own_folder(job));
}

even_status even_bring_back_refuse_damaged(const char *host, const char *folder, const char *why) {
  (void)even_fail(EVEN_ERR_CORRUPT,
                  "no whole checkpoint of the job is left here, and it is not begun anew, for those of other hosts are "
                  "damaged: host %s has %s (%s there)%.200s",
                  host, even_path_name(folder), folder, why);
  return even_error_fix(
      "`evenstep ckpt verify` there names every damage; --resume PATH goes on from a checkpoint elsewhere, without "
      "--resume training begins anew");
}
