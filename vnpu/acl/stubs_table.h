// libascendcl.so. What torch_npu links must exist; what it looks up by name exists only when it does
// something.

// Profiling: no profiler listens here.
VNPU_NOTHING(MsprofRegisterCallback)
VNPU_NOTHING(MsprofReportApi)
VNPU_NOTHING(MsprofReportCompactInfo)
VNPU_NOTHING(MsprofReportAdditionalInfo)
VNPU_NOTHING(MsprofSysCycleTime)
VNPU_NOTHING(MsprofGetHashId)

// Dumps, logs and reports that nobody has asked for.
VNPU_NOTHING(aclmdlInitDump)
VNPU_NOTHING(aclmdlFinalizeDump)
VNPU_NOTHING(aclAppLog)
VNPU_NOTHING(aclrtSubscribeReport)
VNPU_NOTHING(aclrtUnSubscribeReport)
VNPU_NOTHING(aclrtProcessReport)

// Settings without a meaning on host memory: time limits of hardware queues, overflow modes, options.
VNPU_NOTHING(aclrtSetOpWaitTimeout)
VNPU_NOTHING(aclrtSetOpExecuteTimeOut)
VNPU_NOTHING(aclrtSetDeviceSatMode)
VNPU_NOTHING(aclrtSetStreamFailureMode)
VNPU_NOTHING(aclrtSetStreamAttribute)
VNPU_NOTHING(aclrtSetSysParamOpt)
VNPU_NOTHING(aclrtCtxSetSysParamOpt)
VNPU_NOTHING(aclrtCmoAsync)
VNPU_NOTHING(aclrtPeekAtLastError)
VNPU_NOTHING(aclrtGetLastError)

// Things that only a device can do.
VNPU_REFUSED(aclmdlSetDump)
VNPU_REFUSED(aclrtBinaryLoadFromData)
VNPU_REFUSED(aclrtBinaryGetFunction)
VNPU_REFUSED(aclrtGetFunctionAddr)
VNPU_REFUSED(aclrtMemExportToShareableHandle)
VNPU_REFUSED(aclrtMemImportFromShareableHandle)
VNPU_REFUSED(aclrtMemSetPidToShareableHandle)
VNPU_REFUSED(rtDevBinaryRegister)
VNPU_REFUSED(rtFunctionRegister)
VNPU_REFUSED(rtGetC2cCtrlAddr)
VNPU_REFUSED(rtKernelLaunch)
