// A launch of AscendMoeProbe, the kernel of the bring-up, on the twin.
#include "cann/platform.h"
#include "cust_opapi.h"
#include "library.h"
#include "report.h"

namespace vnpu_moe {

namespace {

class ProbeCall : public Call {
public:
    ProbeCall(Tensor report, void* comm, std::vector<uint8_t> tiling)
        : report_(std::move(report)), comm_(comm), tiling_(std::move(tiling)) {}

    const char* type() const override { return moe::InterfaceOf(moe::kOpProbe).type; }
    void Run() override {
        CountLaunch(type());
        char fault[1024] = "";
        const int code = TheLibrary().am_probe(comm_, tiling_.data(), tiling_.size(),
                                               static_cast<uint32_t*>(report_.data), fault, sizeof(fault));
        if (code == 0) return;
        vnpu_error("%s: %s", type(), fault);
        vnpu_fail(kAicoreException);
    }

private:
    Tensor report_;
    void* comm_;
    std::vector<uint8_t> tiling_;
};

}  // namespace

int PrepareProbe(const Arguments& arguments, Tiling tiling, std::shared_ptr<Call>& call) {
    const Tensor& report = arguments.outputs[0];
    const std::vector<int64_t> wanted = {moe::kProbeReportBlocks, moe::kBlockWords};
    if (report.dims != wanted || report.desc.dtype != static_cast<int32_t>(moe::kTypeInt32)) {
        vnpu_error("%s: report must be int32[%u, %u]", arguments.interface().type, moe::kProbeReportBlocks,
                   moe::kBlockWords);
        return kBadArgument;
    }
    moe::MoeProbeTiling probe;
    memcpy(&probe, tiling.bytes.data(), sizeof(probe));
    const bool a2 = probe.contextKind == moe::kContextA2;
    void* comm = nullptr;
    const int status = CommunicatorOf(arguments.String("group_ep"), static_cast<int32_t>(probe.contextKind),
                                      a2 ? static_cast<int32_t>(moe::kA2RanksPerServer) : 0, comm);
    if (status == kOk) call = std::make_shared<ProbeCall>(report, comm, std::move(tiling.bytes));
    return status;
}

}  // namespace vnpu_moe
